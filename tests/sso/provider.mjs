// A certified OpenID provider on loopback: `node provider.mjs SETTINGS.json`, where the settings are
// {"port", "jwks": {"keys": [private keys]}, "clients": {id: secret}}.
//
// A test says in the field `wanted` of its token request what the token should be like (JSON):
// claims: added to the token's own; ttl_s; alg: to sign with; header, payload: put over what the provider made,
// for tokens that no well-behaved provider issues.
import { readFileSync } from "node:fs";
import Provider from "oidc-provider";

const settings = JSON.parse(readFileSync(process.argv[2], "utf8"));
const served = {};

const wanted = (ctx) => JSON.parse(ctx.oidc.body.wanted ?? "{}");

const provider = new Provider(`http://127.0.0.1:${settings.port}`, {
  clients: Object.entries(settings.clients).map(([client_id, client_secret]) => ({
    client_id,
    client_secret,
    grant_types: ["client_credentials"],
    redirect_uris: [],
    response_types: [],
  })),
  jwks: settings.jwks,
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: (ctx, resource) => ({
        audience: resource,
        scope: "",
        accessTokenFormat: "jwt",
        accessTokenTTL: wanted(ctx).ttl_s ?? 600,
        jwt: { sign: { alg: wanted(ctx).alg ?? "ES256" } },
      }),
    },
  },
  extraTokenClaims: (ctx) => wanted(ctx).claims,
  formats: {
    customizers: {
      jwt: (ctx, token, parts) => {
        Object.assign((parts.header ??= {}), wanted(ctx).header);
        Object.assign(parts.payload, wanted(ctx).payload);
      },
    },
  },
});

// How often each path was asked for.
provider.use(async (ctx, next) => {
  if (ctx.path === "/served") {
    ctx.body = served;
    return;
  }
  served[ctx.path] = (served[ctx.path] ?? 0) + 1;
  await next();
});

provider.listen(settings.port, "127.0.0.1");
