"""The parts of the page that --sched-graph FILE.html writes: its frame, its looks, its scripts."""
