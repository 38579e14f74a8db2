"""Coverage-guided fuzzing (atheris) of the parts that do no I/O: `python -m tests.fuzz --seconds 20`."""
