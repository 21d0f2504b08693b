"""The page: `steptime serve`, `steptime report`; it calls the API and holds no formula."""
