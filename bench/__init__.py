"""Measures a user's own workflow on one machine and split, for `monarch bench WORKFLOW.json`.

It drives a ComfyUI over HTTP; what is measured inside of it, nodes/measure.py measures.
"""
