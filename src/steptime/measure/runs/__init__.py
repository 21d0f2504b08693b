"""Measured training runs of other people: from a CSV file to typed runs, plausible settings, and statistics.

Usage::

    reading = read_runs("runs.csv.gz")          # Reading: .runs, .skipped (each with a Reason), .to_json() counts
    for run in reading.timed:                   # MeasuredRun: model (ModelSpec), device, degrees, ..., time, memory
        run.step_time_s, run.time.origin        # seconds and their origin
        run.memory_bytes, run.memory            # bytes of the fullest device and their definition, or None
        run.supports_claim, run.flags           # doubts
        candidates(run)                         # <= 12 Candidates: weight, precision, degrees, micro_batch, zero, ...
    for fold in folds(reading.timed, "source"):  # .held_out, .rest: positions; also "source_and_model", "model"
        ...
    summary([ScoredRun(run=run, step_time_s=..., low_s=..., high_s=..., memory_bytes=...)])  # a JSON object

A row that is not used is in ``Reading.skipped`` with an enumerated :class:`Reason`. Fields that a row leaves open stay
None or empty in the run; :func:`candidates` fills them in, with weights.
"""
