"""One job at an agent: the driver of its core, its workers, and their pending calls. `app` imports it."""
