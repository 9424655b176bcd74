"""The engine: splits the forwards of one render between the driver and its workers.

Imports ComfyUI only in replica and model_store; nothing here knows of nodes or widgets.
"""
