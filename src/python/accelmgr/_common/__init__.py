"""A former name: scripts of users import `_common.checkpoint_state`. Nothing of the package imports from here."""
