"""Measurements. Each script writes a JSON record to results/; numbers in the documents come from those records."""
