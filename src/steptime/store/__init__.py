"""Persistent data: journals of measurements, tables, and files that are whole or absent."""
