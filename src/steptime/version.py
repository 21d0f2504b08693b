"""Version of the package, where the lowest floor can read it."""

__version__ = "0.2.0"
