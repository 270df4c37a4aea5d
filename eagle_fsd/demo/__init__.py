"""The chat page: `python -m eagle_fsd demo`.

settings, answer, worker, session hold what happens; render and tree_view make strings of it; page
puts them into Gradio, which only page and server import; server starts and ends it.
"""
