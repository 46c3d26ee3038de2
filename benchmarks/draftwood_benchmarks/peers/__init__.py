"""Other inference engines that `bench speed` and `bench load` measure beside ours, each in a process of its own."""
