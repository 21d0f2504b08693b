"""Formats of files, one importer or exporter each."""
