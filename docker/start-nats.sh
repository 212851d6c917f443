#!/bin/sh
# Makes what is missing of the hub's keys and of the certificate for TLS, and becomes the server, with the configuration
# that is named or nats.conf. To renew all of them: docker compose down, docker volume rm tensorhub_credentials.
set -eu
umask 077
cd /etc/tensorhub/credentials
if [ "${NATS_NODE:-nats}" = nats ]; then
  tensorhub credentials . --agent agent-0 --agent agent-1 --runner runner-0 --job default > /dev/null
  # Its own authority: clients believe this one certificate, and so do nodes of each other.
  if [ ! -e nats.pem ]; then
    openssl req -x509 -newkey ed25519 -noenc -days 3650 -subj "/CN=nats" \
      -addext "subjectAltName=DNS:nats,DNS:nats-1,DNS:nats-2,DNS:localhost,IP:127.0.0.1" \
      -keyout nats.key -out nats.pem.new 2> /dev/null
    mv nats.pem.new nats.pem
  fi
fi
# The other nodes wait until the first one has made them, a minute at most.
for _ in $(seq 300); do
  [ ! -e nats.pem ] || exec nats-server --config "${1:-/etc/tensorhub/nats.conf}"
  sleep 0.2
done
echo "there is no /etc/tensorhub/credentials/nats.pem: the node 'nats' makes it when it starts" >&2
exit 1
