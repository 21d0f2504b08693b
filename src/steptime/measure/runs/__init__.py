"""Measured training runs of other people: from a CSV file to typed runs, plausible settings, and statistics.

The way of a file::

    reading = read_runs("runs.csv.gz")          # Reading: .runs, .skipped (each with a Reason), .to_json() counts
    for run in reading.timed:                   # MeasuredRun: model (ModelSpec), device, degrees, ..., time, memory
        run.step_time_s, run.time.origin        # seconds, and how they are known
        run.memory_bytes, run.memory            # bytes of the fullest device and what they are, or None
        run.supports_claim, run.flags           # doubts
        candidates(run)                         # <= 12 Candidates: weight, precision, degrees, micro_batch, zero, ...
    for fold in folds(reading.timed, "source"):  # .kept_aside, .rest: positions; also "source_and_model", "model"
        ...
    summary([ScoredRun(run=run, step_time_s=..., low_s=..., high_s=..., memory_bytes=...)])  # a JSON object

A row that is not used is never lost: it is in ``Reading.skipped`` with an enumerated :class:`Reason`. What a row does
not state stays None or empty in the run; :func:`candidates` fills it in, with weights.
"""
