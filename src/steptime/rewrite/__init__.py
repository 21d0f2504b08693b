"""Cheaper equivalent graphs: substitutions with proofs, template passes, searches, and what they gain on a device."""
