"""Source of example_workflows: the graphs in short form, written out as the browser saves them, with a picture each.

`python templates/write.py` writes them, and a test says that nothing was left unwritten. A tool of the
project; ComfyUI and people who install the pack need the result alone."""
