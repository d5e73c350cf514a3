"""Integrations with other libraries. Import only those you need: each one imports its library."""
