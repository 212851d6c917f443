"""Who may say what on NATS: the users of a hub, their keys, and what the server is told of them."""
