"""Where facts go: logs now; metrics, traces and alerts beside them."""
