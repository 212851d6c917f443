"""Whether memory, descriptors, threads or the log grow over thousands of updates.

`make soak UPDATES=2000` or `python -m benchmarks.soak`: three minutes for each transport; exit status 1 on growth.
"""
