"""Integrations with other libraries. Each module imports its library: import what you need."""
