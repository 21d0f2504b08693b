"""Files for other software: traces, memory snapshots."""
