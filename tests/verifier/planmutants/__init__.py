"""Mutants and neutral edits of real schedules, and the simulated GPU as the judge of both."""
