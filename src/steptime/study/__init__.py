"""Studies: many jobs from one file, run by any executor, kept in a store that survives being killed."""
