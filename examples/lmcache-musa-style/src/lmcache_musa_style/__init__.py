"""LMCache on MusaStyle devices. Importing this costs nothing; see spec.py."""
