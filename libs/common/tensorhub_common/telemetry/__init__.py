"""OpenTelemetry's SDK in a process: exporters, kept spans, the page of metrics.

Only programs import it, since it loads the SDK.
"""
