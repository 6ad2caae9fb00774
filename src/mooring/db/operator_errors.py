"""Errors of the database as a whole. Their messages are for the operator."""


class DatabaseProblem(Exception):
    """The database cannot be used now, or a command with it failed."""


class DamagedDatabase(DatabaseProblem):
    """Only the operator can mend it, by a restore."""


class DatabaseInUse(DatabaseProblem):
    """Another process uses it in a way that excludes this one."""


class UnfitBackup(DatabaseProblem):
    """The file is no backup that this program can restore."""
