"""What else the caching allocator can be told and asked: settings, expandable segments, fragmentation."""
