"""Groups of ranks (islands) that train alone and exchange rarely.

::

    hub.py      where islands meet: who is in a round, and everyone's bytes to everyone. Standard library only
    client.py   one rank's connection to it
    wire.py     how numbers become bytes
    outer.py    global weights and momentum: pseudo-gradients, the outer step

An island is an ordinary run with a world of its own. Rank k of every island exchanges with rank k of the others.
"""
