"""What snugfit knows about other libraries; none of them is imported before it is asked for."""
