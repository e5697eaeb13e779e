"""Calls from one role's workers to another's."""


class RoleGroup:
    """The workers of a role, to be called. Its methods are in the making."""
