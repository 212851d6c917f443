"""What an agent records about its calls and reads for logs, status and traces.

Pure; it may import `core` and below, and `jobs` and `control` write what it returns.
"""
