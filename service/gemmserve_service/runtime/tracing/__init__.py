"""Traces in OpenTelemetry's form: the provider of this process, and spans made from recorded times."""
