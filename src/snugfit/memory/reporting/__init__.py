"""What a report says beyond sums: who holds what, what could be freed, how an estimate compares."""
