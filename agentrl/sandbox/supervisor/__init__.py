"""One process per sandboxed call, on the host's side. It starts bubblewrap, watches the tree, ends it, reads results.

Run as a script (`python -I -S <this folder>`) on the standard library alone: a busy event loop or a held lock in the
caller cannot delay a limit, and it starts in milliseconds. Its modules therefore import one another by bare name.
"""
