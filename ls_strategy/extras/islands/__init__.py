"""Groups of ranks (islands) that train alone and exchange rarely.

::

    hub.py      where islands meet: who is in a round, and everyone's bytes to everyone. Standard library only
    server.py   its server; messages.py: what it is asked, checked
    client.py   one rank's connection to it; link.py: one that notices a hub that is silent
    member.py   one rank in the rounds
    wire.py     how numbers become bytes
    outer.py    global weights and momentum: pseudo-gradients, the outer step

An island is an ordinary run with a world of its own. Rank k of every island exchanges with rank k of the others.
"""
