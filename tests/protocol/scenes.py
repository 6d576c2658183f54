"""The scenes that are searched, and the mistakes that are planted, each in the smallest scene that shows it."""

from __future__ import annotations

from tests.protocol.model import Scene

SMALL: dict[str, Scene] = {
    "3 tickets, leases of 2; a kill, a power loss, a return": Scene(tickets=3, lost=0),
    "a lost answer": Scene(tickets=3, kills=0),
    "a log whose name is not on the disk": Scene(tickets=2, lost=0, returns=0, closes=1),
    "a server that restarts under its clients": Scene(tickets=3, lost=0, kills=0, server=True),
    "commits at once": Scene(tickets=2, lost=0, rides=False),
    "a snapshot each 3 lines": Scene(tickets=3, lost=0, snapshot=3),
    "an anchor": Scene(tickets=3, lost=0, anchor=True),
    "an anchor and a restored copy": Scene(tickets=2, lost=0, kills=0, anchor=True, copies=True),
    "2 tenants with caps of 2": Scene(tickets=3, lost=0, kills=0, tenants=("x", "y"), cap=2),
    "a journal of burns; tickets of the dead return": Scene(tickets=2, lost=0, journal=True),
    "3 processes, a kill": Scene(tickets=3, processes=3, lost=0, losses=0, returns=0),
    "6 tickets, leases of 3, at most half of what is left": Scene(
        tickets=6, lease=3, divide=2, lost=0, losses=0, kills=0
    ),
}

_FULL = Scene(tickets=4, returns=2)

FULL: dict[str, Scene] = {
    "4 tickets, leases of 2; a kill, a power loss, a lost answer, 2 returns": _FULL,
    "a log whose name is not on the disk": Scene(tickets=3, returns=1, closes=2, losses=2),
    "3 processes, a log whose name is not on the disk": Scene(tickets=3, processes=3, returns=0, closes=2, lost=0),
    "a server that restarts under its clients": Scene(tickets=3, returns=2, server=True),
    "commits at once": Scene(tickets=3, returns=2, rides=False),
    "a snapshot each 3 lines": Scene(tickets=4, returns=2, snapshot=3, lost=0),
    "an anchor": Scene(tickets=4, returns=2, anchor=True),
    "an anchor and a restored copy": Scene(tickets=3, lost=0, anchor=True, copies=True),
    "2 tenants with caps of 2": Scene(tickets=4, returns=1, tenants=("x", "y"), cap=2, lost=0),
    "a journal of burns; tickets of the dead return": Scene(tickets=4, journal=True, lost=0, kills=2),
    "3 processes, 4 tickets; a kill, a power loss, a return": Scene(tickets=4, processes=3, lost=0),
    "6 tickets, leases of 3, at most half of what is left; a kill, a power loss": Scene(
        tickets=6, lease=3, divide=2, lost=0
    ),
}

_PLAIN = Scene(tickets=2)
_COPIED = Scene(tickets=3, lease=1, losses=0, kills=0, lost=0, returns=0, anchor=True, copies=True)
_NEW_LOG = Scene(tickets=2, lost=0, returns=0, closes=1)

_TENANTS = Scene(lost=0, kills=0, losses=0, returns=0, tenants=("x", "y"))

_NOT_ON_DISK = "0 tickets charged on the disk"
_BURNT = "a ticket that was burnt was given back"
_TOO_MANY = "4 private reads on 3 tickets"

PLANTS: dict[str, tuple[Scene, str]] = {
    "tickets of others return after a while": (Scene(tickets=2, returns=0), _NOT_ON_DISK),
    "tickets of the dead return": (_PLAIN, _BURNT),
    "the journal is read after a loss of power": (_PLAIN, _BURNT),
    "a ticket burns before its line is durable": (_PLAIN, _NOT_ON_DISK),
    "a lost answer leases twice": (_PLAIN, _NOT_ON_DISK),
    "a commit is written before its reservation is durable": (_PLAIN, "a commit before its reservation is durable"),
    "a commit puts the ticket back": (_PLAIN, _BURNT),
    "a snapshot is taken before the lines beside it": (
        Scene(tickets=3, lost=0, losses=0, snapshot=3),
        "a snapshot differs from its lines",
    ),
    "lines count as seen before they are durable": (Scene(tickets=2, server=True), "a line that was seen is gone"),
    "the anchor gets a line before the line is durable": (
        Scene(tickets=2, anchor=True),
        "the anchor has a line that a crash took",
    ),
    "a fork keeps the lease": (Scene(tickets=3), _BURNT),
    "the purse is emptied after the line": (_PLAIN, _BURNT),
    "a lease that waits goes back as a whole, and is granted": (_PLAIN, _BURNT),
    "what goes back of a lease that waits is granted, too": (_PLAIN, _BURNT),
    "the anchor gets the last line only": (_COPIED, _TOO_MANY),
    "the anchor gets lines that are read anew": (_COPIED, _TOO_MANY),
    "its own line is not looked for behind the anchor's": (_COPIED, _TOO_MANY),
    "caps are counted in each process": (
        Scene(tickets=6, lost=0, kills=0, losses=0, returns=0, tenants=("x",), cap=2),
        "3 reads of tenant 'x', cap 2",
    ),
    "a purse does not name the tenant": (_TENANTS, "1 reads of tenant 'y', 0 charged"),
    "each tenant has a purse of full size": (_TENANTS, "refused with 0 free and 4 in purses"),
    "who is refused keeps its purse": (_TENANTS, "refused with 0 free and 4 in purses"),
    "nobody writes the name of the log": (_NEW_LOG, _NOT_ON_DISK),
    "only who made the log writes its name": (_NEW_LOG, _NOT_ON_DISK),
}
"""By what is done wrong: the scene, and what is found."""
