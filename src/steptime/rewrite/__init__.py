"""Cheaper equivalent graphs: proved substitutions, template passes, searches, and their gains on a device."""
