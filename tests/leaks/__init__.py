"""The leak matrix: two canaries x every channel x every entry point, naive and ours side by side.

`models` answer with canaries, `naive` is the component as people write it, `rooms` are ours, `channels` watch, and
`matrix` runs the cells. `tests/check_leaks.py` runs the whole on several langchain-core and prints the table.
"""
