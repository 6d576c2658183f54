"""Observability packages, one per process, beside the naive chain and beside ours.

`registry` lists the observers and runs one, `recorders` and `spans` start them, `collector` is the server that they send
to, and `words` turns what was seen into the cells of a table. `tests/check_observers.py` makes an environment for each
package, runs them all and prints the table.
"""
