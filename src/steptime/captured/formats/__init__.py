"""Files that other software reads: traces, memory snapshots."""
