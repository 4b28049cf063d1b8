"""The tests of the kit. They are run by ``lmcache device verify``, never collected by themselves."""
