"""Files that several processes share: written atomically, locked, appended to, or read from untrusted writers."""
