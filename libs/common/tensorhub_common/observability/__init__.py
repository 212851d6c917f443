"""What any module may import to log, count and trace: no SDK of OpenTelemetry.

Everything but pure packages imports it; of those only `trace_context` is pure, and may be imported by them.
"""
