"""SSH into instances, without a server in the image: sessions become commands, forwarding becomes dials."""
