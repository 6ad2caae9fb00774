"""The port proxy: HTTP/1.1 and WebSockets from browsers and programs to ports of instances."""
