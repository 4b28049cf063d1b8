"""Templates of ``lmcache device new``: files ``*.tmpl`` in the tree that they are written to.

``common`` goes into every project, ``override`` or ``native`` beside it. ``dot-`` stands for a leading dot,
``package`` for the import package. ``@name@`` and its like are replaced, see ``cli.verbs.device_new``.
"""
