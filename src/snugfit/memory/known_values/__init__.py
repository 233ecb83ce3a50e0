"""Which numbers a traced step may read: known ones are followed, the rest is assumed by name or refused."""
