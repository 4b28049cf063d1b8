"""One module per verb of ``lmcache``: ``add(parser)`` declares its flags, ``run(args)`` does it."""
