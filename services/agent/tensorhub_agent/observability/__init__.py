"""What calls and reads leave behind: records, spans, log lines, and the status of reads under way. Pure.

`jobs` and `control` import it.
"""
