"""The web page: `steptime serve`, `steptime report`; it calls the API and has no formulas of its own."""
