"""The ways out when nothing fits, a file each: the job is changed, or spread over cards."""
