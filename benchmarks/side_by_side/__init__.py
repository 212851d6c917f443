"""How fast a version reaches one reader and four, beside memcpy, UCX's own measure, plain sockets and other libraries.

`python -m benchmarks [--quick] [--docs]`, with `--peers` for the libraries and `--telemetry` for what telemetry costs;
`python -m benchmarks.side_by_side.mapped` measures readers that map a version.
"""
