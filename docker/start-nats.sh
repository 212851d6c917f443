#!/bin/sh
# Makes what is missing of the hub's keys and of the certificate for TLS, and becomes the server. To renew all of them:
# docker compose down, docker volume rm tensorhub_credentials.
set -eu
umask 077
cd /etc/tensorhub/credentials
tensorhub credentials . --agent agent-0 --agent agent-1 --job default > /dev/null
# Its own authority: clients believe this one certificate.
[ -e nats.pem ] || openssl req -x509 -newkey ed25519 -noenc -days 3650 -subj "/CN=nats" \
  -addext "subjectAltName=DNS:nats,DNS:localhost,IP:127.0.0.1" -keyout nats.key -out nats.pem 2> /dev/null
exec nats-server --config /etc/tensorhub/nats.conf
